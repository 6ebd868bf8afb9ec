"""Operations on DTensors: dispatch finds the rule, the other files have them."""
