"""Several answers to each prompt, ranked by people or by a judge."""
