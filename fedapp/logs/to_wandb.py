"""A run in Weights & Biases: configuration, a step per round, tags, and an artifact with the files.

wandb decides where it is: ``WANDB_MODE``, ``WANDB_PROJECT``, ``WANDB_DIR`` and others. Nothing is
sent about this machine: no code, host, git state or console output.
"""

from __future__ import annotations

import os
from pathlib import Path

import wandb

from fedapp.home import display_path
from fedapp.logs.logger import LoggedRun, files_of, final_tags, final_values, round_values
from fedapp.run_folder import RoundInfo, RunFolder

PROJECT = "fedapp"


class ToWandb:
    """Implements ``fedapp.logs.logger.Logger``."""

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id or None,
            resume="allow" if run_id else None,
            name=run.path.name,
            config={**run.params, **run.tags},
            tags=[run.tags["fedapp.strategy"]],
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
            ),
        )
        self.run_id = str(self._run.id)
        offline = f"{display_path(Path(self._run.settings.sync_dir))}, to be sent by wandb sync"
        self.place = offline if self._run.offline else str(self._run.url)

    def round(self, info: RoundInfo) -> None:
        self._run.log(round_values(info), step=info["round"])

    def end(self, folder: RunFolder) -> None:
        """Log scores in the summary, and the files."""
        summary = folder.summary
        self._run.summary.update({**final_values(summary), **final_tags(summary)})
        artifact = wandb.Artifact(f"model-{summary['model_id']}", type="model")
        for path in files_of(folder):
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)
        self._run.finish()

    def fail(self, is_stopped: bool) -> None:
        """Finish with an exit code other than 0."""
        self._run.finish(exit_code=1)


LOGGER = ToWandb
