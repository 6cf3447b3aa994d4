"""What a site's store has."""

from fedapp.site.store import PART_FILE, STATE, Store, sealed


def with_arrays(store):
    """Names of the values that have arrays."""
    return {name for name, one in store._values.items() if one.has_arrays}


def seal(folder, document):
    """Write any document as a party's part."""
    (folder / PART_FILE).write_bytes(sealed(dict(document)))


def store_of(folder, state):
    """The store whose file has these bytes, in a folder of its own."""
    folder.mkdir(parents=True)
    (folder / STATE).write_bytes(state)
    return Store.open(folder)
