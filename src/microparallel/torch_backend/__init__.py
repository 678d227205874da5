"""Our collectives as a backend of torch.distributed: `init_process_group("microparallel")` in any torch program."""
