"""The SuperLinks in Flower's configuration, and clients of their Control API.

A fault becomes a sentence by the type of its exception and by the code of the answer.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapp.errors import ConfigError, RunFailedError, did_you_mean
from fedapp.home import read_toml

if TYPE_CHECKING:  # Flower takes a second to import
    import httpx
    from flwr.supercore.control import ControlHttpClient

SIMULATED = ("local", "simulation")  # engines, and names of Flower's that are no SuperLinks
START = "at the coordinator: start-superlink.sh of FOLDER, its unit or compose.yaml"
DATABASE = "at the coordinator: put FOLDER/flower/superlink.db back"
# Why a SuperLink refused, and the way out, by the status of its answer.
REFUSED: Mapping[int, str] = {
    401: (
        "must know the user, got a name or a password that it does not; at the coordinator: "
        "fedapp federation add FOLDER --user NAME"
    ),
    502: f"must answer behind its nginx, got nginx alone: it is starting, or is gone; {START}",
    500: (
        "must be able to use its database, got an internal error, which its own log names; "
        f"{DATABASE}, and FOLDER/start-superlink.sh"
    ),
}
LOST = (
    "must have the database that the run began with, got another or an empty one; "
    f"{DATABASE}, or run again"
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
            return SuperLinkError(f"{link} must answer, got {_fault(error)}")
        status, fault = error.response.status_code, FlowerError.from_json(error.response.text)
        if fault is None and status in REFUSED:
            return SuperLinkError(f"{link} {REFUSED[status]}")
        if fault and fault.code == ApiErrorCode.RUN_ID_NOT_FOUND:
            return SuperLinkError(f"{link} {LOST}", has_lost_run=True)
        why = " ".join(filter(None, (fault.message, fault.public_details))) if fault else ""
        phrase = why or error.response.reason_phrase
        return SuperLinkError(f"{link} must do as asked, got {status}: {phrase}")


def _fault(error: BaseException) -> str:
    """Why a SuperLink cannot be reached, and the way out."""
    import httpx

    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            way = "at the coordinator: fedapp federation renew FOLDER"
            return f"a certificate that is refused ({cause.verify_message}); {way}"
    is_refused = isinstance(error, httpx.ConnectError)
    if is_refused and not any(isinstance(cause, ssl.SSLError) for cause in causes):
        return f"no connection; {START}"
    return f"a connection without an answer: it is starting, stopped or overloaded; {START}"


def flower_config() -> Path:
    """Path of Flower's configuration; a coordinator's env.sh sets its folder, FLWR_HOME."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"


def superlinks() -> dict[str, SuperLink]:
    """The SuperLinks in Flower's configuration, by name."""
    path = flower_config()
    if not path.is_file():
        return {}
    try:
        links = read_toml(path.read_text(), f"{path} must be TOML").get("superlink", {})
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be TOML: {error}") from None
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
