"""What the pipeline is compared with. Nothing here imports Anabranch: the peers have an environment of their own."""
