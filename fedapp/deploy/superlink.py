"""``flower-superlink`` for a coordinator, with long polling.

``python -m fedapp.deploy.superlink`` takes the options of ``flower-superlink``.
"""

from __future__ import annotations

from functools import partial

from fedapp.deploy.supernode import run_flower

main = partial(run_flower, "superlink")

if __name__ == "__main__":
    main()
