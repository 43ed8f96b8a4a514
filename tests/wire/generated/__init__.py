"""Generated from schemas/fbs/timeline.fbs by scripts/schema.sh; untouched by hand."""
