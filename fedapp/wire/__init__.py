"""Messages as Flower records, their delivery, and the ledger of traffic."""
