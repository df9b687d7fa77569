"""The alphabet of shapes. A tensor whose shape is not plain has the shape as the suffix of its
name, as in `logits_BTV`, and docstrings write this shape as [B, T, V]. A letter has one meaning in
the whole project, and a digit is a size itself. A variable that holds a size is named by its
letter: `B, T = ids_BT.shape`.
"""

LETTERS = {
    "A": "anchors of a row",
    "B": "rows of a batch: texts, or the live beams of a search",
    "C": "children of a node, or candidates for a token",
    "D": "width of a hidden state",
    "Dh": "width of an attention head",
    "Dr": "numbers of a head that are rotated by its position",
    "Dt": "width of the target's hidden states, where it differs from that of the draft's",
    "E": "cells into which a hybrid sorts its evidence",
    "F": "features: what a network or a regression reads, such as several layers of the target",
    "G": "drafted nodes of a proposal; in a chain, γ of them",
    "H": "attention heads",
    "Hg": "query heads that share a key head",
    "Hkv": "key heads",
    "K": "depths, or the nodes of a path, one for each depth",
    "k": "the depths so far: the first k of the K",
    "L": "layers of the target",
    "Lr": "rank of a product of two matrices",
    "M": "places of a block: the anchor and what is drafted after it; G + 1 in a proposal",
    "N": "entries of one list over all rows: anchors, positions, documents, records",
    "P": "what attention may read: slots of a cache, or the T - 1 pairs of a text",
    "Ps": "scratch slots of a cache, whose tokens are not committed yet",
    "Q": "scouts: tokens that a pass reads only to learn what follows them",
    "R": "rows picked out for a step",
    "Ro": "rounds that a decoder made along a text",
    "S": "draft vocabulary",
    "T": "time: the tokens of a row, of a pass or of an answer",
    "Td": "tokens of a document by itself",
    "Te": "tokens that an encoder reads",
    "Tx": "tokens of a text and then those drafted at its anchors: T + X",
    "U": "entries picked out of a list such as N",
    "V": "the target's vocabulary",
    "W": "what a pass of the draft reads: nodes that grow together, new pairs or features",
    "Wo": "those of W whose output is asked for",
    "X": "what is drafted at all anchors of a row: A times K, or A times M",
}
