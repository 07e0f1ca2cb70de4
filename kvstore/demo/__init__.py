"""A small inference engine that embeds the store as an outsider would: through public names only."""
