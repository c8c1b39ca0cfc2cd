"""FairScale's implementations, as their best users run them; nothing else imports it."""
