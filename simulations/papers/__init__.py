"""The papers' tables and figures, reproduced: one module a paper."""
