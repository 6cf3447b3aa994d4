import os

# A worker of pytest has a core: threads of XGBoost and of NumPy would wait for each other. Each of
# the two reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis

# On a busy machine an example may take any time.
hypothesis.settings.register_profile("fedapp", deadline=None)
hypothesis.settings.load_profile("fedapp")
