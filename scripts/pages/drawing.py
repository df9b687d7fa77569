"""SVG pictures as text: the same bytes on every machine, so that a test can compare them."""

from dataclasses import dataclass, field
from html import escape

INK, GREY, PALE = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, ORANGE, GREEN, RED, YELLOW = "#2563eb", "#ea580c", "#16a34a", "#dc2626", "#ca8a04"
TINTS = {GREEN: "#dcfce7", RED: "#fee2e2", BLUE: "#dbeafe", YELLOW: "#fef9c3", GREY: "#f3f4f6"}
TINTS |= {ORANGE: "#ffedd5"}
DARK = {  # the colours of dark pages
    INK: "#e5e7eb",
    GREY: "#9ca3af",
    PALE: "#374151",
    BLUE: "#60a5fa",
    ORANGE: "#fb923c",
    GREEN: "#4ade80",
    RED: "#f87171",
    YELLOW: "#facc15",
    "white": "#0f172a",
    TINTS[GREEN]: "#14532d",
    TINTS[RED]: "#7f1d1d",
    TINTS[BLUE]: "#1e3a8a",
    TINTS[YELLOW]: "#713f12",
    TINTS[GREY]: "#1e293b",
    TINTS[ORANGE]: "#7c2d12",
}
# Advance widths of DejaVu Sans in hundredths of the font's size. It is the widest of the fonts that
# stand in where Helvetica and Arial are missing, so what fits in it fits everywhere.
WIDTHS = {
    "I J i j l": 29,
    "space ' , . · / : ; | f": 35,
    "( ) - t [ ] ‘ ’": 39,
    'r s z ? _ " “ ” !': 53,
    "c k v x y F T L": 62,
}
OTHER, WIDE, MONO = 66, 84, 61  # letters and digits; capitals and signs; each of a fixed width
WIDER = {"m": 97, "M": 86, "W": 99, "@": 100, "%": 95, "…": 100}
ADVANCE = {c.replace("space", " "): w for cs, w in WIDTHS.items() for c in cs.split(" ")} | WIDER


def width_of(words: str, size: float, *, mono: bool = False) -> float:
    """The maximum width of words in pixels, over common fonts."""

    def hundredths(c: str) -> int:
        if mono:
            return MONO
        letter = c.isdigit() or (c.isalpha() and not c.isupper() and c != "w")
        return ADVANCE.get(c, OTHER if letter else WIDE)

    return size * sum(map(hundredths, words)) / 100


@dataclass
class Drawing:
    """A picture of a size in pixels. It is dark for readers who prefer dark pages."""

    width: int
    height: int
    title: str  # a description for screen readers
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 13,
        at: str = "start",
        ink: str = INK,
        mono: bool = False,
        struck: bool = False,
    ) -> None:
        """Words whose baseline begins, ends or has its middle at a point. They must stay within the
        picture in the widest font, too."""
        width = width_of(words, size, mono=mono)
        left = x - {"start": 0, "middle": width / 2, "end": width}[at]
        assert left >= 4 and left + width <= self.width - 4, f"{words!r} leaves {self.title!r}"
        assert size <= y <= self.height - 4, f"{words!r} leaves {self.title!r}"
        more = ' font-family="monospace" xml:space="preserve"' if mono else ""
        more += f' textLength="{width:g}" lengthAdjust="spacingAndGlyphs"' if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{at}" fill="{ink}"{more}>'
            f"{escape(words)}</text>"
        )
        if struck:
            self.line(left, y - size / 3, left + width, y - size / 3, ink, width=1)

    def inside(
        self, x: float, y: float, w: float, words: str, *, size: int = 13, ink: str = INK
    ) -> None:
        """Words in the middle of a box of this width, in which they must fit."""
        fits = width_of(words, size) <= w - 4
        assert fits, f"{words!r} needs a box of {width_of(words, size) + 4:.0f}, not {w:g}"
        self.text(x + w / 2, y, words, size=size, at="middle", ink=ink)

    def box(
        self, x: float, y: float, w: float, h: float, ink: str, *, fill: str = "", round: int = 4
    ) -> None:
        """A rectangle; without `fill`, in the tint of its `ink`."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round}" '
            f'fill="{fill or TINTS.get(ink, "white")}" stroke="{ink}"/>'
        )

    def line(
        self, x: float, y: float, x2: float, y2: float, ink: str = GREY, *, width: float = 1.5
    ) -> None:
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ink}" '
            f'stroke-width="{width:g}"/>'
        )

    def curve(self, points: list[tuple[float, float]], ink: str, *, width: float = 2) -> None:
        """A line through points."""
        through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{through}" fill="none" stroke="{ink}" stroke-width="{width:g}"/>'
        )

    def arrow(self, x: float, y: float, x2: float, y2: float, ink: str = GREY) -> None:
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ink}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def token(
        self, x: float, y: float, w: float, words: str, ink: str, struck: bool = False
    ) -> None:
        """A token in a box of this width and 30 pixels high, struck out if `struck`."""
        self.box(x, y, w, 30, ink)
        self.inside(x, y + 20, w, words)
        if struck:
            self.line(x + 8, y + 15, x + w - 8, y + 15, ink, width=2)

    def svg(self) -> str:
        """The whole file."""
        dark = "\n".join(
            f'[{part}="{ink}"] {{ {part}: {other} }}'
            for ink, other in DARK.items()
            for part in ("fill", "stroke")
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" '
                'font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<style>@media (prefers-color-scheme: dark) {{\n{dark}\n}}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker>'
                "</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="white"/>',
                *self.parts,
                "</svg>\n",
            ]
        )
