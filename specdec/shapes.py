"""The letters of tensor shapes. A tensor whose shape is not obvious has it as the suffix of its
name, as in `logits_BTV`, and docstrings write this shape as [B, T, V]. Each letter has one meaning
in the whole project, and a digit is a fixed size. A variable that holds a size is named by its
letter, as in `B, T = ids_BT.shape`, or by words where two sizes share a letter."""

LETTERS = {
    "A": "anchors of a row",
    "B": "rows of a batch: sequences, or the live beams of a search",
    "C": "children of a node, or candidates for a token",
    "D": "width of a vector: a hidden state, an attention head, a rotary embedding",
    "F": "inputs of a network or a fit, such as the hidden states of several layers of the target",
    "G": "drafted nodes of a proposal; in a chain, γ of them",
    "H": "attention heads: query heads, key heads, or the query heads that share a key head",
    "K": "depths, or the nodes of a path, one for each depth",
    "M": "places of a block: the anchor and the tokens drafted after it; G + 1 in a proposal",
    "N": "entries of one list: anchors, positions, documents, records, steps, or picked entries",
    "P": "keys of attention: slots of a cache, or the T - 1 pairs of a sequence",
    "S": "draft vocabulary",
    "T": "time: the tokens of a row, a document, a forward pass or a response",
    "V": "the target's vocabulary",
}
