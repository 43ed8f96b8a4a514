"""One scenario per module, each an async function of its settings."""
