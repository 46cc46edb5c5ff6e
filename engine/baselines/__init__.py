"""The old way beside the new one: memory reserved in one piece, and batches that run until their last member is done.

Policies, each one idea more than the one before:

- `static`: a batch is made up, run until all of it is done, and then the next one; memory is reserved in one piece for
  the longest that each request can come to (as in FasterTransformer).
- `contiguous`: requests join and leave the batch at every step (as in Orca, Yu et al., OSDI 2022); memory as above.
- `paged`: and memory is taken block by block as it is needed (Kwon et al., SOSP 2023); this is the engine itself.

All of them run the same model over the same pool and give equal greedy outputs; what differs is who runs when.
"""
