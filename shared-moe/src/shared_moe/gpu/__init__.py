"""What `shared-moe bench --gpu` runs: every op checked on the GPU, then timed beside its peers and the roofline."""
