"""The sites of a running federation: which keys its SuperLink knows, and how they change.

The folder ``sites`` of a coordinator has their names (``names.txt``), public keys (``NAME.pub``)
and Flower's ids (``NAME.node``). The SuperLink admits sites by its own list of keys, which is read
and changed here while it runs. It never forgets a key: one that was removed stays refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes

from fedapp.deploy.folders import NAMES, check_name, write_names
from fedapp.deploy.targets import PUBLIC
from fedapp.errors import ConfigError, did_you_mean
from fedapp.home import read_toml, write_atomically
from fedapp.site.certificates import key_fingerprint, public_key_in
from fedapp.superlinks import SuperLink, SuperLinkError


@dataclass(frozen=True, slots=True)
class Member:
    """A site of a federation, as the SuperLink knows it."""

    name: str
    status: str  # Flower's: registered (and never connected), online, offline; else none, unknown
    since: datetime | None  # when the status began
    fingerprint: str  # of the registered key, or else of NAME.pub; empty without one


def names_in(folder: Path) -> list[str]:
    """Names of a federation's sites; ConfigError if the folder is not a coordinator's."""
    if not (folder / "register-sites.sh").exists():
        raise ConfigError(f"folder must be one of fedapp federation init, got {folder}")
    names = folder / "sites" / NAMES
    sites = sorted((folder / "sites").glob("*.pub"))
    listed = names.read_text().split() if names.exists() else []
    return [*dict.fromkeys([*listed, *(path.stem for path in sites)])]


def add_sites(folder: Path, names: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Add sites and register the keys in ``sites``; yields each name, and its fingerprint or none.

    A key that differs from the registered one replaces it, and the old one is refused from then on.
    Without `names` all sites of the federation are registered. ConfigError if a name or a key is
    invalid, SuperLinkError if the SuperLink does not answer.
    """
    before = names_in(folder)
    for name in names:
        check_name(name)
    files = {name: folder / "sites" / f"{name}.pub" for name in names or before}
    keys = {name: public_key_in(path) for name, path in files.items() if path.exists()}
    write_names(folder, dict.fromkeys((*before, *names)))
    yield from ((name, "") for name in files if name not in keys)
    if not keys:
        return
    with _superlink(folder) as superlink:
        nodes = superlink.ListNodes(ListNodesRequest()).nodes_info
        for name, key in keys.items():
            content = public_key_to_bytes(key)
            node_id = _registered_as(files[name], content, nodes)
            if not node_id:
                _unregister(superlink, name, nodes)
                request = RegisterNodeRequest(public_key=content, name=name)
                node_id = superlink.RegisterNode(request).node_id
            write_atomically(files[name].with_suffix(".node"), f"{node_id}\n".encode(), PUBLIC)
            yield name, key_fingerprint(key)


def remove_site(folder: Path, name: str) -> None:
    """Unregister a site, which is refused from then on; its files stay as ``NAME.*.removed``.

    ConfigError if it is not one of the federation, SuperLinkError without an answer.
    """
    names = names_in(folder)
    if name not in names:
        rule = f"name must be a site of {folder} ({', '.join(names) or 'none'}), got {name}"
        raise ConfigError(f"{rule}{did_you_mean(name, names)}")
    with _superlink(folder) as superlink:
        _unregister(superlink, name, superlink.ListNodes(ListNodesRequest()).nodes_info)
    for path in (folder / "sites" / f"{name}.pub", folder / "sites" / f"{name}.node"):
        if path.exists():
            path.rename(f"{path}.removed")
    write_names(folder, [site for site in names if site != name])


def members(folder: Path) -> tuple[list[Member], str]:
    """All sites of a federation, and why their status is unknown, else an empty text."""
    nodes = list[NodeInfo]()
    status = "not registered"
    fault = ""
    try:
        with _superlink(folder) as superlink:
            nodes = [*superlink.ListNodes(ListNodesRequest()).nodes_info]
    except SuperLinkError as error:
        status, fault = "unknown", str(error)
    sites = []
    for name in dict.fromkeys([*names_in(folder), *(node.name for node in nodes if _is_on(node))]):
        path = folder / "sites" / f"{name}.pub"
        key = key_fingerprint(public_key_in(path)) if path.exists() else ""
        registered = [_member(node) for node in nodes if node.name == name and _is_on(node)]
        sites += registered or [Member(name, status, None, key)]
    return sites, fault


def _member(node: NodeInfo) -> Member:
    times = {
        NodeStatus.ONLINE: node.last_activated_at,
        NodeStatus.OFFLINE: node.last_deactivated_at,
    }
    since = datetime.fromisoformat(times.get(node.status) or node.registered_at)
    key = key_fingerprint(bytes_to_public_key(node.public_key))
    return Member(node.name, node.status, since, key)


def _is_on(node: NodeInfo) -> bool:
    """Whether the SuperLink accepts a node's key."""
    return bool(node.status != NodeStatus.UNREGISTERED)


def _unregister(superlink: ControlHttpClient, name: str, nodes: Iterable[NodeInfo]) -> None:
    for node in nodes:
        if node.name == name and _is_on(node):
            superlink.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))


def _registered_as(path: Path, key: bytes, nodes: Iterable[NodeInfo]) -> int:
    """Id by which a key, that of NAME.pub, is registered, or 0; ConfigError if it may not be."""
    node = next((node for node in nodes if node.public_key == key), None)
    if node is None:
        return 0
    if not _is_on(node):
        rule = f"{path} must be a new key, got one that was removed or replaced"
        raise ConfigError(f"{rule}; at {path.stem}: fedapp site key --new supernode")
    if node.name != path.stem:
        raise ConfigError(f"{path} must be the key of {path.stem}, got that of {node.name}")
    return int(node.node_id)


def _superlink(folder: Path) -> AbstractContextManager[ControlHttpClient]:
    """A client of a coordinator's SuperLink; SuperLinkError if it does not answer."""
    path = folder / "flower" / "config.toml"
    links = read_toml(path.read_bytes(), f"{path} must be TOML")["superlink"]
    return SuperLink(links["default"], links[links["default"]]).client()
