"""Elements as strings: everything is escaped."""

from xml.etree import ElementTree

from microparallel.drawing.markup import element


def test_attributes_are_escaped():
    made = ElementTree.fromstring(element("g", 'a < b & "c"', aria_label="'\"<>&", class_="x", width=1.5, height=None))
    assert made.attrib == {"aria-label": "'\"<>&", "class": "x", "width": "1.5"}
    assert made.text == 'a < b & "c"'
