"""The host's state and decisions about requests: slots, KV blocks, draft lengths, masks."""
