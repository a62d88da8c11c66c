"""The Durable Objects: wardens that keep bytes near, and the station, shard and session objects."""
