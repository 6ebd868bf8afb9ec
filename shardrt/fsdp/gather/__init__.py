"""How the parameters of a group become whole: flat, as codes, or as a parameter's own methods say."""
