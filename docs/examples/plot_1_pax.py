"""
PAX beside pooled XGBoost
=========================

Stub.
"""
