"""Plans of openings that tests write by hand, at sites that share this process's home."""

from fedapp.site.trust import site_fingerprint


def planned(names, **fields):
    """Fields of a plan between these parties; room for what tests ask, unless ``fields`` differ."""
    parties = tuple(names)
    fingerprints = tuple(site_fingerprint(name) for name in parties)
    depth = fields.get("max_depth", 6)
    room = {"rounds": 50, "trees": 1, "max_depth": depth, "levels": depth, "max_bin": 1024}
    return {**room, **fields, "parties": parties, "fingerprints": fingerprints}
