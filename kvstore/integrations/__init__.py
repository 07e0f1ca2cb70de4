"""Where others meet the store: models of transformers, kernels of other libraries."""
