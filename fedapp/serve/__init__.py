"""An HTTP endpoint that scores rows with a run's model.

``scorer`` opens the model and scores rows, whole or divided among parties simulated on this
machine; ``app`` speaks HTTP. The room knows nothing of training. Read ``scorer`` first.
"""
