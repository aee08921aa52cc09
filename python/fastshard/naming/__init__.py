"""Names that both readers and writers need: rank files, chunks, trainers' own words."""
