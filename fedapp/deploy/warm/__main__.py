"""``python -m fedapp.deploy.warm`` fails where a site uses Flower's own ways, and says so."""

from __future__ import annotations

from fedapp.deploy.warm import SITE

raise SystemExit(not SITE.are_known())
