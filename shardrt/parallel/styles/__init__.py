"""How a module is split: api has parallelize_module, styles the plans, modules what is put in their place."""
