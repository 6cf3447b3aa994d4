"""Sites of tests: their node configs and contexts."""

from flwr.app import Context, RecordDict

from fedapp.messages.methods import all_methods


def site_contexts(*nodes):
    """Contexts of parties with tables of their own; the label is y where nothing else is said,
    every method is allowed, and small keys will do."""
    usual = {"label": "y", "allow-insecure": "true", "allow": ",".join(all_methods())}
    contexts = []
    for node_id, node in enumerate(nodes, start=2):
        own = {key: one if isinstance(one, bool) else str(one) for key, one in node.items()}
        contexts.append(Context(0, node_id, usual | own, RecordDict(), {}))
    return contexts
