"""FlashMoE in frameworks that load and run models. Importing this package imports none of them."""
