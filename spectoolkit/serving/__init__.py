"""What serving engines log of acceptance: `vllm`, `sglang` and `llamacpp` read, `counts` pools, `table` writes."""
