from krea_runner.cli.app import main

if __name__ == "__main__":
    main()
