"""The page on which people rank answers: `rlhf rank STORE`. Only `server.py` is imported from outside."""
