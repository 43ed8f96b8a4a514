"""How deliveries arrive, wait, are handled and are settled."""
