"""Workers, Durable Objects, R2 and KV in CPython, for laptops and tests."""
