"""FlashMoE in frameworks that load and run models. Importing this imports none of them."""
