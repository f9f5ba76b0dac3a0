from waitlist import create_app

app = create_app()
