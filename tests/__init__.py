import os

# A worker of pytest has a core: threads of XGBoost and of NumPy would wait for each other. Each of
# the two reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
