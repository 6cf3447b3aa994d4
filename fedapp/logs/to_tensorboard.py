"""A run for TensorBoard: event files in the subfolder ``tensorboard`` of the run's folder.

``tensorboard --logdir runs`` shows all runs side by side: numbers by round, parameters, and the
model card as text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as of_params
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text import metadata as of_text
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from fedapp.home import display_path
from fedapp.logs.logger import LoggedRun, final_tags, final_values, round_values
from fedapp.report.card import CARD
from fedapp.run_folder import RoundInfo, RunFolder

FOLDER = "tensorboard"


class ToTensorBoard:
    """Implements ``fedapp.logs.logger.Logger``."""

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        path = run.path / FOLDER
        self.run_id, self.place = FOLDER, f"tensorboard --logdir {display_path(path)}"
        self._writer = EventFileWriter(str(path))
        if not run_id:
            self._add(hparams_pb(dict(run.params)), 0)
            self._add(_text("fedapp", _table(run.tags)), 0)

    def round(self, info: RoundInfo) -> None:
        self._add(_scalars(round_values(info)), info["round"])
        self._writer.flush()

    def end(self, folder: RunFolder) -> None:
        """Log scores and the model card; the model stays in the run's folder."""
        summary = folder.summary
        self._add(_scalars(final_values(summary)), 0)
        self._add(_text("fedapp/end", _table(final_tags(summary))), 0)
        if (card := folder.path / CARD).is_file():
            self._add(_text("model-card", card.read_text(encoding="utf-8")), 0)
        self._close(api_pb2.STATUS_SUCCESS)

    def fail(self, is_stopped: bool) -> None:
        """Close the run; TensorBoard does not distinguish stopped from failed."""
        self._close(api_pb2.STATUS_FAILURE)

    def _close(self, status: Any) -> None:
        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        about = plugin_data_pb2.HParamsPluginData(session_end_info=end)
        value = summary_pb2.Summary.Value(
            tag=of_params.SESSION_END_INFO_TAG,
            metadata=of_params.create_summary_metadata(about),
            tensor=of_params.NULL_TENSOR,
        )
        self._add(summary_pb2.Summary(value=[value]), 0)
        self._writer.close()

    def _add(self, summary: Any, step: int) -> None:
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))


def _scalars(values: Mapping[str, float]) -> Any:
    value = summary_pb2.Summary.Value
    return summary_pb2.Summary(
        value=[value(tag=name, simple_value=number) for name, number in values.items()]
    )


def _text(tag: str, text: str) -> Any:
    """A Markdown text in the format of TensorBoard's text plugin."""
    about = of_text.create_summary_metadata(display_name="", description="")
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()])
    tensor.tensor_shape.dim.add(size=1)
    value = summary_pb2.Summary.Value(tag=tag, metadata=about, tensor=tensor)
    return summary_pb2.Summary(value=[value])


def _table(tags: Mapping[str, str]) -> str:
    lines = (f"| {name} | {value} |" for name, value in tags.items())
    return "\n".join(["| tag | value |", "| --- | --- |", *lines])


LOGGER = ToTensorBoard
