"""``flower-superlink`` for a coordinator, with long polling.

``python -m fedapp.deploy.superlink`` takes the options of ``flower-superlink``.
"""

from __future__ import annotations

from fedapp.deploy.supernode import run_flower

if __name__ == "__main__":
    run_flower("superlink")
