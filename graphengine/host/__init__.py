"""What the host keeps and decides about requests: slots, KV blocks, drafts' lengths, masks."""
