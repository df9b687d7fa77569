"""SVG pictures as text: the same bytes on every machine, so that a test can compare them."""

from dataclasses import dataclass, field
from html import escape

INK, GREY, PALE = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, ORANGE, GREEN, RED, YELLOW = "#2563eb", "#ea580c", "#16a34a", "#dc2626", "#ca8a04"
TINTS = {GREEN: "#dcfce7", RED: "#fee2e2", BLUE: "#dbeafe", YELLOW: "#fef9c3", GREY: "#f3f4f6"}


@dataclass
class Drawing:
    """A picture of a size in pixels on a white ground, which is right in a dark page as well."""

    width: int
    height: int
    title: str  # what it shows, for those who cannot see it
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, at: str = "start", ink: str = INK
    ) -> None:
        """Words whose baseline begins, ends or has its middle at a point."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{at}" fill="{ink}">'
            f"{escape(words)}</text>"
        )

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

    def arrow(self, x: float, y: float, x2: float, y2: float, ink: str = GREY) -> None:
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ink}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def token(
        self, x: float, y: float, w: float, words: str, ink: str, struck: bool = False
    ) -> None:
        """A token of a text in a box of this width and 30 pixels high, perhaps struck out."""
        self.box(x, y, w, 30, ink)
        self.text(x + w / 2, y + 20, words, at="middle")
        if struck:
            self.line(x + 8, y + 15, x + w - 8, y + 15, ink, width=2)

    def svg(self) -> str:
        """The whole file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" '
                'font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker>'
                "</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="white"/>',
                *self.parts,
                "</svg>\n",
            ]
        )
