"""Sites of tests: their node configs and contexts, and what they answer."""

from fedapp.messages.methods import all_methods
from fedapp.messages.wire import from_bytes
from fedapp.runs import local
from fedapp.site.answer import ON_DISK, answered


def site_contexts(*nodes):
    """Contexts of parties with tables of their own; the label is y where nothing else is said,
    every method is allowed, and small keys will do."""
    usual = {"label": "y", "allow-insecure": "true", "allow": ",".join(all_methods())}
    texts = (
        {key: one if isinstance(one, bool) else str(one) for key, one in node.items()}
        for node in nodes
    )
    return local.site_contexts(usual | own for own in texts)


def answer(config, kind, envelope, content, stores=ON_DISK):
    """What a site answers to a message, as its receiver reads it."""
    return from_bytes(answered(config, kind, envelope, content, stores), config.name)
