"""The studio: the built course and this machine's runs in a browser, from a small server that only its user can ask."""

from microparallel.studio.server import Studio, site_of

__all__ = ["Studio", "site_of"]
