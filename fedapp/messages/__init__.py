"""What is sent: every request, reply and letter, with the form of each field.

One module a method or a shared part, each opening with **Reveals**: who learns what. This room
knows no tables, no training and no network: it declares and checks messages, and lays them out as
bytes (``wire``). Begin with ``fields``, then ``handshake``, with which every run opens.
"""
