"""The SuperLinks in Flower's configuration, and clients of their Control API.

A fault becomes a sentence by the type of its exception, by the code of the answer, and by what a
refused certificate says. A site's SuperNode shares `unreached`.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapp.errors import ConfigError, RunFailedError, as_plain, did_you_mean
from fedapp.home import read_toml

if TYPE_CHECKING:  # Flower takes a second to import
    import httpx
    from cryptography import x509
    from flwr.supercore.control import ControlHttpClient

SIMULATED = ("local", "simulation")  # engines, and names of Flower's that are no SuperLinks
START = "at the coordinator: start-superlink.sh of FOLDER, its unit or compose.yaml"
DATABASE = "put FOLDER/flower/superlink.db back"
HANGS = "at the coordinator: end its process, which its script, unit or container starts again"
ISSUED = "put the coordinator's FOLDER/ca.crt in its place"
OFF = 60.0  # seconds between two clocks, of which one then is wrong
LOOK_SECONDS = 5.0
OUT_OF_DATE = (9, 10)  # OpenSSL: not valid yet, or any more
ANOTHER_HOST = (62, 64)  # a name, an address
UNKNOWN_USER = (
    "must know the user, got a name or a password that it does not; at the coordinator: "
    "fedapp federation add FOLDER --user NAME"
)
# Why a SuperLink failed, and the way out, by the status of its answer.
NGINX, FAILED = "must answer behind its nginx, got", 500
BROKEN: Mapping[int, str] = {
    FAILED: (
        "must do as asked, got an internal error: the last ERROR of its own log says which; "
        f"where that has sqlite3, it is the database's: make room on its disk, or {DATABASE}; "
        f"then, {HANGS}"
    ),
    **dict.fromkeys((502, 503, 504), f"{NGINX} nginx alone: it is starting, or is gone; {START}"),
}
NGINX_FAILED = (
    f"{NGINX} nginx's internal error, which its own log names; at the coordinator: it must be able "
    "to read FOLDER/nginx.users, and its disk must have room"
)
# Why a SuperLink does not admit a site: its SuperNode died just now, or by its key.
LET_GO = 3  # intervals of a SuperNode's heartbeat, in which the SuperLink forgets it
NOT_ADMITTED = {
    "died": "still has this site's last SuperNode, for {seconds} s at most",
    "new": (
        "does not know this site's key; at the coordinator: put {pub} into FOLDER/sites, and "
        "fedapp federation add FOLDER {name}"
    ),
    "removed": (
        "does not know this site's key any more, or has another SuperNode with it; here: "
        "fedapp site key --new supernode; then at the coordinator: put {pub} into FOLDER/sites, "
        "and fedapp federation add FOLDER {name}"
    ),
}
LOST = (
    "must have the database that the run began with, got another or an empty one; "
    f"at the coordinator: {DATABASE}, or run again"
)


class SuperLinkError(RunFailedError):
    """A SuperLink that did not answer, or refused."""

    def __init__(self, cause: str, has_lost_run: bool = False) -> None:
        super().__init__(cause, [])
        self.has_lost_run = has_lost_run  # as its database was replaced


@dataclass(frozen=True, slots=True)
class SuperLink:
    """A SuperLink by its name in Flower's configuration, with what stands there."""

    name: str
    values: Mapping[str, Any] = field(repr=False)  # a user's address has the password

    @property
    def host(self) -> str:
        """Its address, without a user's name and password."""
        return str(self.values.get("address", "no address")).rpartition("@")[2]

    @property
    def authority(self) -> str:
        """Name of the authority whose certificate it must show; empty if that is not its own."""
        from cryptography.x509 import load_pem_x509_certificate

        path = self.values.get("root-certificates")
        with suppress(OSError, ValueError):  # which the client names
            subject = load_pem_x509_certificate(Path(path).read_bytes()).subject if path else ()
            return str(next((part.value for part in subject), ""))
        return ""

    @contextmanager
    def client(self) -> Iterator[ControlHttpClient]:
        """A client of its Control API, as ``flwr`` makes it; SuperLinkError instead of httpx's."""
        import httpx
        from flwr.cli.cli_account_auth_interceptor import CliAccountAuthHttpInterceptor
        from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
        from flwr.cli.flower_config import parse_superlink_connection
        from flwr.cli.utils import load_cli_auth_plugin_from_connection
        from flwr.proto.control_pb2 import RefreshAuthTokensRequest
        from flwr.supercore.auth.typing import AccountAuthCredentials
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        def refresh(token: str) -> AccountAuthCredentials:
            answer = client.RefreshAuthTokens(RefreshAuthTokensRequest(refresh_token=token))
            return AccountAuthCredentials(answer.access_token, answer.refresh_token)

        rule = f"superlink.{self.name} in Flower's configuration must be a SuperLink's, got"
        try:
            link = parse_superlink_connection(dict(self.values), self.name)
            path = link.root_certificates
            certificates = Path(path).read_bytes() if path else None
            plugin = load_cli_auth_plugin_from_connection(str(link.address))
            plugin.load_tokens()
            interceptors = (
                CliClientHttpInterceptor(),
                RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
                CliAccountAuthHttpInterceptor(plugin, refresh),
            )
            client = ControlHttpClient.from_server_address(
                str(link.address), link.insecure, certificates, interceptors
            )
        except (OSError, UnicodeDecodeError):  # OSError: of ssl too
            what = f"the certificate of the SuperLink '{self.name}' must be readable, got"
            raise SuperLinkError(f"{what} {self.values['root-certificates']}") from None
        except ValueError as error:
            raise SuperLinkError(f"{rule}: {error}") from None
        with client:
            try:
                yield client
            except httpx.HTTPError as error:
                raise self._error(error) from None
            except httpx.InvalidURL:
                raise SuperLinkError(f"{rule} the address {self.host}") from None

    def _error(self, error: httpx.HTTPError) -> SuperLinkError:
        """The meaning of an exception of the client's."""
        import httpx
        from flwr.supercore.error import ApiErrorCode, FlowerError

        link = f"the SuperLink '{self.name}' at {self.host}"
        if not isinstance(error, httpx.HTTPStatusError):
            ca = Path(path) if (path := self.values.get("root-certificates")) else None
            return SuperLinkError(f"{link} must answer, got {unreached(error, self.host, ca)}")
        status, fault = error.response.status_code, FlowerError.from_json(error.response.text)
        sentence = UNKNOWN_USER if status == 401 else _failure(error.response)
        if fault is None and sentence:
            return SuperLinkError(f"{link} {sentence}")
        if fault and fault.code == ApiErrorCode.RUN_ID_NOT_FOUND:
            return SuperLinkError(f"{link} {LOST}", has_lost_run=True)
        why = " ".join(filter(None, (fault.message, fault.public_details))) if fault else ""
        phrase = why or error.response.reason_phrase
        return SuperLinkError(f"{link} must do as asked, got {status}: {phrase}")


def note_reached(path: Path) -> None:
    """Touch a file whenever a SuperLink has answered a client of this process."""
    import httpx

    send = httpx.Client.send

    def send_and_note(*given: Any, **named: Any) -> httpx.Response:
        response = send(*given, **named)
        if response.is_success:
            path.touch()
        return response

    httpx.Client.send = send_and_note  # type: ignore[method-assign]


def site_fault(error: BaseException | None, words: Sequence[str], reached: Path) -> str:
    """Why a site's SuperNode, of a command of these words, gets no connection, and the way out.

    ``reached`` is the file that notes when it last had one.
    """
    import httpx
    from flwr.supercore import heartbeat
    from flwr.supercore.error import ApiErrorCode, FlowerError

    options = dict(pairwise(words))
    host, ca = options.get("--superlink", ""), options.get("--root-certificates")
    if isinstance(error, httpx.TransportError):
        return f"the SuperLink at {host} gives {unreached(error, host, Path(ca) if ca else None)}"
    if not isinstance(error, httpx.HTTPStatusError):
        return f"{type(error).__name__}: {error}"
    fault = FlowerError.from_json(error.response.text)
    if fault and fault.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        key = Path(options.get("--auth-supernode-private-key", ""))
        had = reached.stat().st_mtime if reached.exists() else 0.0
        seconds = LET_GO * vars(heartbeat)["HEARTBEAT_DEFAULT_INTERVAL"]  # patched, or Flower's
        cause = "died" if time.time() - had < seconds else "removed"
        cause = "new" if had < key.stat().st_mtime else cause
        name = os.environ.get("FEDAPP_NAME", "NAME")
        pub = key.with_name(f"{name}.pub")
        why = NOT_ADMITTED[cause].format(name=name, pub=pub, seconds=seconds)
    else:
        why = (not fault and _failure(error.response)) or f"answers {error}"
    return f"the SuperLink at {host} {why}"


def _failure(response: httpx.Response) -> str:
    """Why a SuperLink, or the nginx before it, has failed, and the way out; empty if unknown."""
    status = response.status_code
    is_nginx = status == FAILED and "nginx" in response.text  # the SuperLink's own is JSON
    return NGINX_FAILED if is_nginx else BROKEN.get(status, "")


def unreached(error: BaseException, host: str, ca: Path | None) -> str:
    """Why a SuperLink at HOST:PORT cannot be reached, and the way out.

    ``ca`` has the certificates that this machine trusts; None: those of public authorities.
    """
    import httpx

    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _refused_certificate(cause, host, ca)
        if isinstance(cause, socket.gaierror):
            return f"no host of that name ({cause.strerror}): its address must be right"
    in_tls = any("handshake" in str(cause) for cause in causes if isinstance(cause, TimeoutError))
    if in_tls or isinstance(error, httpx.ReadTimeout):
        return f"a connection without an answer: it is overloaded, or hangs; {HANGS}"
    has_ended = any(isinstance(cause, ssl.SSLError | ConnectionResetError) for cause in causes)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) and not has_ended:
        return f"no connection; {START}"
    return f"a connection that ends without an answer: it is starting, or stopped; {START}"


def _refused_certificate(error: ssl.SSLCertVerificationError, host: str, ca: Path | None) -> str:
    """Why a certificate is refused: by its names, its issuer, and its dates by two clocks."""
    from cryptography import x509

    refused = f"a certificate that is refused ({error.verify_message})"
    try:
        certificate, server_time, is_public = _presented(host)
        trusted = x509.load_pem_x509_certificates(ca.read_bytes()) if ca else []
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):  # gone since, or nothing that shows one
        return refused
    if error.verify_code in ANOTHER_HOST:
        if ca is None:  # the names are of a server that nobody has checked
            return f"{refused}; its address must be right, as the coordinator has given it"
        listed = as_plain(", ".join(str(name.value) for name in names))
        return f"{refused}; its address must be one of the certificate's: {listed}"
    if error.verify_code not in OUT_OF_DATE:
        if ca is None:
            return f"{refused}; give the coordinator's FOLDER/ca.crt as root certificates"
        if is_public:
            way = f"omit the root certificates, {ca}, if the coordinator has said so"
            return f"{refused}; it is a public authority's: {way}"
        others = as_plain(", ".join(one.subject.rfc4514_string() for one in trusted))
        issuer = as_plain(certificate.issuer.rfc4514_string())
        return (
            f"{refused}: {issuer} has signed it, {ca} is of {others} or its earlier key; {ISSUED}"
        )
    ahead = time.time() - server_time if server_time else 0.0
    if abs(ahead) > OFF and _are_valid([certificate, *trusted], server_time):
        side, days = "ahead of" if ahead > 0 else "behind", abs(ahead) / 86_400
        far = f"{days:,.0f} days" if days > 2 else f"{abs(ahead):.0f} s"
        clock = f"this machine's clock is {far} {side} the SuperLink's"
        return f"{refused}: {clock}; set it, as timedatectl set-ntp true does"
    if _are_valid([certificate], time.time()):
        return f"{refused}: {ca} is an earlier one; {ISSUED}"
    if ca is None:
        return f"{refused}; at the coordinator: renew it at its authority"
    return f"{refused}; at the coordinator: fedapp federation renew FOLDER; then {ISSUED}: {ca}"


def _are_valid(certificates: Iterable[x509.Certificate], at: float) -> bool:
    """Whether a time (Unix) is between the dates of all certificates."""
    when = datetime.fromtimestamp(at, UTC)
    return all(one.not_valid_before_utc <= when <= one.not_valid_after_utc for one in certificates)


def _presented(host: str) -> tuple[x509.Certificate, float, bool]:
    """The certificate that a server presents, its clock (0: unknown), and whether a public
    authority has signed it.

    The server may be anybody: it is asked for its health, and what it shows makes a hint only.
    """
    from cryptography import x509

    name, _, port = host.rpartition(":")
    name = name.strip("[]")
    context = ssl.create_default_context()  # of public authorities, for this very name

    def look() -> tuple[bytes, bytes]:
        with (
            socket.create_connection((name, int(port)), LOOK_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=name) as connection,
        ):
            connection.sendall(f"GET /health HTTP/1.0\r\nHost: {name}\r\n\r\n".encode())
            return connection.getpeercert(True) or b"", connection.recv(4096)

    is_public = True
    try:
        content, answer = look()
    except ssl.SSLCertVerificationError:
        is_public, context.check_hostname = False, False
        context.verify_mode = ssl.CERT_NONE
        content, answer = look()
    date = re.search(rb"(?im)^date: *(.+?)\r?$", answer)
    clock = parsedate_to_datetime(date[1].decode("ascii")).timestamp() if date else 0.0
    return x509.load_der_x509_certificate(content), clock, is_public


def flower_config() -> Path:
    """Path of Flower's configuration; a coordinator's env.sh sets its folder, FLWR_HOME."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"


def superlinks() -> dict[str, SuperLink]:
    """The SuperLinks in Flower's configuration, by name."""
    path = flower_config()
    if not path.is_file():
        return {}
    links = read_toml(path.read_bytes(), f"{path} must be TOML").get("superlink", {})
    return {
        name: SuperLink(name, link)
        for name, link in links.items()
        if isinstance(link, Mapping) and name not in SIMULATED
    }


def find_superlink(name: str) -> SuperLink:
    """The SuperLink of a name; ConfigError if Flower's configuration has none."""
    links = superlinks()
    if name in links:
        return links[name]
    engines = [*SIMULATED, *links]
    rule = f"must be {', '.join(engines)}, or another SuperLink in {flower_config()}"
    way = "; a coordinator first sources its own: . FOLDER/env.sh"
    raise ConfigError(f"engine {rule}, got {name!r}{did_you_mean(name, engines) or way}")
