"""Routes of the Open Inference Protocol V2, which KServe, Triton, MLServer and Seldon speak, and of
``POST /score`` for people, over anything that is ``Served``.

An input or output is one column, of shape [n] or [n, 1]. Triton's extension for binary data has no
null: NaN and an empty text are missing in it. Source: github.com/kserve/open-inference-protocol.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fedapp.data.schema import composed
from fedapp.errors import did_you_mean
from fedapp.process import versions
from fedapp.serve.http import (
    CONNECTION,
    Admission,
    RefusedError,
    RowError,
    check_rows,
    read_body,
    read_object,
)

CLASS = "class"  # name of the output that has classes
LENGTH = "Inference-Header-Content-Length"  # bytes of JSON, after which binary data begin
LONG = 50_000  # bytes of a body that is read in a thread, so that others are answered meanwhile
NUMBERS = {f"FP{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)}  # types, in binary data
NUMBERS |= {f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)}
NUMBERS |= {f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)}
BINARY = {**NUMBERS, "BOOL": "?"}
# In JSON; other numbers are (int, float).
TYPES: dict[str, tuple[type, ...]] = {name: (int,) for name in NUMBERS if "INT" in name}
TYPES |= {"BOOL": (bool, str), "BYTES": (str,)}
# Types that a request may have for an input; a boolean may be "yes", "no", 1 or 0, as in /score.
TAKES = {"FP64": (*NUMBERS,), "BOOL": ("BOOL", "BYTES", *NUMBERS)}
HINT = {"content_type": ""}  # MLServer's clients send it; it changes nothing
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output; ``datatype`` is FP32, FP64, INT64, BOOL or BYTES, which is text."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (-1,)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks; values of ``/score``, but ids, may be of other types than the input's.

    ``purpose`` and ``way``, to score where there are several, are the protocol's ``parameters`` of
    these names, ``request`` its ``id``. ``connection`` is there at a standing process only.
    """

    columns: Mapping[str, Sequence[Any]]  # of all inputs by name, in whole rows; None is missing
    purpose: str = ""
    way: str = ""
    request: str = ""
    explains: bool = False  # /score?explain=1
    connection: Any = None  # of the caller: see http.check_awaited


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """Scores by name, each of an output's type; a class a row or none; and facts, as JSON, of all
    rows, and of each if it was to be explained."""

    scores: Mapping[str, npt.NDArray[Any]]
    classes: Sequence[str]
    facts: Mapping[str, Any]
    explained: Sequence[Mapping[str, Any]] = ()


class Served(Protocol):
    """A model: `answer` may raise ``RefusedError`` or DataError, `ready` says why it cannot yet."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def inputs(self) -> Sequence[Tensor]: ...
    @property
    def outputs(self) -> Sequence[Tensor]: ...

    async def answer(self, asked: Asked) -> Answered: ...
    async def ready(self) -> str: ...


def routes(
    served: Served, most_rows: int, most_bytes: int, admission: Admission | None = None
) -> list[Route]:
    """Routes for an application that has ``http.HANDLERS``; ``/score`` is the first."""
    admission = admission or Admission()

    async def server(request: Request) -> Response:
        about = {"name": "fedapp", "version": versions()["fedapp"]}
        return JSONResponse({**about, "extensions": ["binary_tensor_data"]})

    async def live(request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(request: Request) -> Response:
        about = _named(served, request) if request.path_params else {}
        if reason := await served.ready():
            return JSONResponse({**about, "ready": False, "error": reason}, 503)
        return JSONResponse({**about, "ready": True})

    async def model(request: Request) -> Response:
        about = {**_named(served, request), "versions": [served.version], "platform": "fedapp"}
        inputs, outputs = (
            [asdict(tensor) for tensor in tensors] for tensors in (served.inputs, served.outputs)
        )
        return JSONResponse({**about, "inputs": inputs, "outputs": outputs})

    async def infer(request: Request) -> Response:
        _named(served, request)
        with admission:
            body = await read_body(request, most_bytes)
            length = request.headers.get(LENGTH, str(len(body)))
            asked, outputs = await _run(body, _read_infer, served, body, length, most_rows)
            asked = replace(asked, connection=request.scope.get(CONNECTION))
            answered = await served.answer(asked)
            return await _run(body, _infer_reply, served, asked, answered, outputs)

    async def score(request: Request) -> Response:
        """Scores of one row, {"row": ...} by column names, or of several, {"rows": [...]}."""
        with admission:
            body = await read_body(request, most_bytes)
            asked, is_one = await _run(body, _read_score, served, body, most_rows)
            explains = request.query_params.get("explain", "0") != "0"
            connection = request.scope.get(CONNECTION)
            asked = replace(asked, connection=connection, explains=explains)
            return await _run(body, _score_reply, served, await served.answer(asked), is_one)

    paths = [("/v2", server), ("/v2/health/live", live), ("/v2/health/ready", ready)]
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        paths += [(path, model), (f"{path}/ready", ready), (f"{path}/infer", infer)]
    return [
        Route("/score", score, methods=["POST"]),
        *(Route(path, to, methods=["POST" if to is infer else "GET"]) for path, to in paths),
    ]


async def _run(body: bytes, work: Callable[..., R], *arguments: Any) -> R:
    return work(*arguments) if len(body) < LONG else await run_in_threadpool(work, *arguments)


def _named(served: Served, request: Request) -> dict[str, str]:
    """The model's name; refuses a path with another name or version."""
    for what, name in request.path_params.items():
        if name != getattr(served, what):
            rule = f"model {what} must be {getattr(served, what)!r}"
            raise RefusedError(404, f"{rule}, got {name[:80]!r}")
    return {"name": served.name}


def _refused(rule: str, got: object) -> RefusedError:
    return RefusedError(422, f"{rule}, got {str(got)[:80]}")


def _fields(entry: Any, what: str, **forms: Any) -> list[Any]:
    """Values of an object of the protocol; a form is a default, or the type of a required field."""
    if not isinstance(entry, dict) or (unknown := entry.keys() - forms):
        got = f"a field {min(unknown)!r}" if isinstance(entry, dict) else type(entry).__name__
        raise _refused(f"{what} must be an object with fields of {', '.join(forms)}", got)
    values = [entry.get(name, form) for name, form in forms.items()]
    for value, (name, form) in zip(values, forms.items(), strict=True):
        wanted = form if isinstance(form, type) else type(form)
        if type(value) is not wanted:
            got = "none" if value is form else type(value).__name__
            raise _refused(f"{what}: {name} must be of type {wanted.__name__}", got)
    return values


def _read_infer(
    served: Served, body: bytes, length: str, most_rows: int
) -> tuple[Asked, dict[str, bool]]:
    """What a request asks, and the outputs that it wants, each with whether it is binary."""
    if not (length.isdecimal() and len(length) < 12 and int(length) <= len(body)):
        raise _refused(f"{LENGTH} must be a number of bytes within the body", length)
    document = read_object(body[: int(length)], "body must be an inference request in JSON")
    forms = {"model_name": served.name, "id": "", "parameters": {}, "inputs": list, "outputs": []}
    name, request_id, parameters, inputs, outputs = _fields(document, "request", **forms)
    if name != served.name:  # KServe's clients repeat it here
        raise _refused(f"model_name must be {served.name!r}", name)
    forms = {"purpose": "", "way": "", "binary_data_output": False, **HINT}
    purpose, way, is_binary, _ = _fields(parameters, "parameters", **forms)
    tensors, binary = {tensor.name: tensor for tensor in served.inputs}, body[int(length) :]
    columns = dict[str, list[Any]]()
    for index, entry in enumerate(inputs):
        forms = {"name": str, "datatype": str, "shape": list, "parameters": {}, "data": []}
        name, datatype, shape, parameters, data = _fields(entry, f"inputs[{index}]", **forms)
        size, _ = _fields(parameters, f"{name} parameters", binary_data_size=-1, **HINT)
        if (name := composed(name)) not in tensors or name in columns:
            hint = did_you_mean(name, tensors)
            raise _refused("inputs must be those of the model, once each", f"{name!r}{hint}")
        if ("data" in entry) == (size >= 0):
            got = "both" if size >= 0 else "neither"
            raise _refused(f"input {name!r} must have data or binary_data_size >= 0", got)
        check_rows(shape[0] if shape and isinstance(shape[0], int) else 0, most_rows)
        values = binary[:size] if size >= 0 else data
        columns[name] = _column(tensors[name], datatype, shape, values)
        binary = binary[max(size, 0) :]
    sizes = {name: len(columns.get(name, ())) for name in tensors}
    if len(set(sizes.values())) > 1 or not columns:
        raise _refused("inputs must be all of the model's, of equally many rows", sizes)
    if binary:
        raise _refused("binary data must be those of inputs", f"{len(binary)} bytes more")
    names = [tensor.name for tensor in served.outputs]
    wanted = {} if outputs else dict.fromkeys(names, is_binary)
    for index, entry in enumerate(outputs):
        name, parameters = _fields(entry, f"outputs[{index}]", name=str, parameters={})
        (wanted[name], _) = _fields(parameters, f"{name} parameters", binary_data=is_binary, **HINT)
        if name not in names:
            hint = did_you_mean(name, names)
            raise _refused(f"outputs must be of {', '.join(names)}", f"{name!r}{hint}")
    return Asked(columns, purpose, way, request_id), wanted


def _column(tensor: Tensor, datatype: str, shape: list[Any], values: Any) -> list[Any]:
    """Values of an input in whole rows, of JSON or of binary data; None is missing."""
    what = f"input {tensor.name!r}"
    if datatype not in TAKES.get(tensor.datatype, (tensor.datatype,)):
        raise _refused(f"{what} must be {tensor.datatype}", datatype)
    tensor = replace(tensor, datatype=datatype)
    if not (shape and type(shape[0]) is int and shape[0] > 0 and shape[1:] in ([], [1])):
        raise _refused(f"{what} must have shape [n] or [n, 1], n >= 1", shape)
    if isinstance(values, bytes):
        values = _unpacked(tensor, values, what)
    else:
        if shape[1:] and all(isinstance(row, list) and len(row) == 1 for row in values):
            values = [value for (value,) in values]
        values = _typed(tensor, values, what)
    if len(values) != shape[0]:
        raise _refused(f"{what} must have as many values as shape {shape}", len(values))
    return list(values)


def _typed(tensor: Tensor, values: Sequence[Any], what: str) -> list[Any]:
    """Values of JSON in a tensor's datatype; None is missing."""
    types, form = TYPES.get(tensor.datatype, (int, float)), NUMBERS.get(tensor.datatype)
    typed = list[Any](values)
    for row, value in enumerate(values):
        try:
            if value is not None and type(value) not in types:
                raise TypeError
            if value is not None and form:
                with np.errstate(over="raise"):
                    typed[row] = np.array(value, form).item()
        except (TypeError, ArithmeticError):
            rule = f"{what} must hold {tensor.datatype} or null"
            got = json.dumps(value)[:40]
            raise RowError(f"{rule}, got {got} in row {row}", tensor.name, row) from None
    return [None if value != value else value for value in typed]


def _unpacked(tensor: Tensor, binary: bytes, what: str) -> list[Any]:
    """Values of binary data: numbers little-endian, texts in UTF-8 after 4 bytes of length."""
    values, offset = list[Any](), 0
    try:
        if form := BINARY.get(tensor.datatype):
            values = np.frombuffer(binary, form).tolist()
            return [None if value != value else value for value in values]
        while offset < len(binary):
            (n_bytes,) = struct.unpack_from("<I", binary, offset)
            offset += 4 + n_bytes
            values.append(binary[offset - n_bytes : offset].decode() or None)
        if offset > len(binary):
            raise ValueError
    except (ValueError, struct.error):
        rule = f"{what} must have {tensor.datatype} as binary data"
        raise _refused(rule, f"{len(binary)} bytes that are none") from None
    return values


def _infer_reply(
    served: Served, asked: Asked, answered: Answered, outputs: Mapping[str, bool]
) -> Response:
    tensors, buffers = list[dict[str, Any]](), list[bytes]()
    datatypes = {tensor.name: tensor.datatype for tensor in served.outputs}
    for name, is_binary in outputs.items():
        values = list(answered.classes) if name == CLASS else answered.scores[name].tolist()
        tensor: dict[str, Any] = {"name": name, "shape": [len(values)]}
        tensor["datatype"] = datatype = datatypes[name]
        if is_binary:
            texts = [value.encode() for value in values if name == CLASS]
            packed = b"".join(struct.pack("<I", len(text)) + text for text in texts)
            buffers.append(packed or np.array(values, BINARY[datatype]).tobytes())
            tensor["parameters"] = {"binary_data_size": len(buffers[-1])}
        else:
            tensor["data"] = values
        tensors.append(tensor)
    facts = {  # the protocol's parameters are numbers, booleans or texts
        name: fact if isinstance(fact, str | int | float) else json.dumps(fact, ensure_ascii=False)
        for name, fact in answered.facts.items()
        if name not in ("model", "version")
    }
    version = answered.facts.get("version", served.version)
    about = {"model_name": served.name, "model_version": version}
    about |= {"id": asked.request} if asked.request else {}
    reply = JSONResponse({**about, "parameters": facts, "outputs": tensors})
    if not buffers:
        return reply
    content = b"".join((head := bytes(reply.body), *buffers))
    return Response(content, 200, {LENGTH: str(len(head))}, "application/octet-stream")


def _read_score(served: Served, body: bytes, most_rows: int) -> tuple[Asked, bool]:
    names = [tensor.name for tensor in served.inputs]
    forms = {"row": 1, "rows": 0} | ({"id": 1, "ids": 0} if names == ["id"] else {})
    rule = f"body must be an object with one of {', '.join(forms)}, and maybe purpose and way"
    document = read_object(body, rule)
    about = {name: document.pop(name, "") for name in ("purpose", "way")}
    are_texts = all(isinstance(text, str) for text in about.values())
    if len(document) != 1 or not document.keys() <= forms.keys() or not are_texts:
        raise _refused(rule, ", ".join(document) or "none")
    ((form, rows),) = document.items()
    rows = [rows] if forms[form] else rows
    if not isinstance(rows, list) or not rows:
        raise _refused(f"{form} must be a list of one or more", type(rows).__name__)
    check_rows(len(rows), most_rows)
    if form in ("id", "ids"):
        return Asked({"id": _typed(served.inputs[0], rows, "id")}, **about), bool(forms[form])
    if not all(isinstance(row, dict) for row in rows):
        raise _refused(f"{form} must be by column names", "others")
    return Asked(_columns_of_rows(rows, names), **about), bool(forms[form])


def _columns_of_rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The rows by column; a RowError if a row has other columns than these."""
    expected = set(names)
    for number, row in enumerate(rows):
        if row.keys() == expected:
            continue
        for name in row:
            if name not in expected:
                rule = f"row {number} must have only columns of the model, got {name!r}"
                raise RowError(rule + did_you_mean(name, names), name, number)
        name = next(name for name in names if name not in row)
        rule = f"row {number} must have all columns of the model (null: missing), lacks {name!r}"
        raise RowError(rule, name, number)
    return {name: [row[name] for row in rows] for name in names}


def _score_reply(served: Served, answered: Answered, is_one: bool) -> Response:
    columns = zip(*(scores.tolist() for scores in answered.scores.values()), strict=True)
    rows: list[dict[str, Any]] = [
        {"scores": dict(zip(answered.scores, scores, strict=True))} for scores in columns
    ]
    for row, name in zip(rows, answered.classes, strict=bool(answered.classes)):
        row["class"] = name
    for row, facts in zip(rows, answered.explained, strict=bool(answered.explained)):
        row.update(facts)
    about = {"model": served.name, "version": served.version}
    return JSONResponse({**about, **(rows[0] if is_one else {"rows": rows}), **answered.facts})
