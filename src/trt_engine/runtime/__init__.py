"""An engine made to run: `inference_engine` has the public class."""
