"""The colours of operations."""

import pytest

from microparallel.drawing.kinds import KINDS, shaded


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_names_can_be_read_on_their_colours(kind):
    """The contrast that accessibility asks of text, in every shade that is used with this ink."""
    assert contrast(kind.fill, kind.ink) >= 4.5
    if kind.ink == "#000000":
        assert contrast(shaded(kind.fill, 3), kind.ink) >= 4.5
