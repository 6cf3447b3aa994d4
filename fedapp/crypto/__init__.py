"""Secrets: Paillier keys and ciphertexts, packed numbers, and sums of ciphertexts."""
