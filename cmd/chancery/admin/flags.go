// Package admin owns how a command names the running server that it speaks to over the admin socket (decision D14).
//
// It refuses to guess: the socket is given, or the config file of the server that has it. Only where a command says so, and neither
// is given, the server of a `chancery dev` is asked if one runs.
package admin

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/server"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
)

// Flags name a running server.
type Flags struct {
	Config string // file of the server's config
	Socket string
	Dev    string // admin socket of `chancery dev`, for a command that may fall back to it; empty: it may not
}

// Add adds -c and --admin to a command.
func (f *Flags) Add(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.Config, "config", "c", "", "config file of the server (YAML)")
	f.AddSocket(cmd)
}

// AddSocket adds --admin to a command that has a -c of its own, which goes into Config.
func (f *Flags) AddSocket(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.Socket, "admin", "", "admin socket of the server: admin.sock in the folder of its state (default: as the config says)")
}

// Again returns the flags as another command needs them to ask the same server, with a space before them; empty if none was given.
func (f *Flags) Again() string {
	switch {
	case f.Socket != "":
		return " --admin " + f.Socket
	case f.Config != "":
		return " -c " + f.Config
	}
	return ""
}

// Call calls f with a connection to the server, and explains what went wrong.
func (f *Flags) Call(ctx context.Context, patience time.Duration, do func(context.Context, chanceryv1.AdminClient) error) error {
	socket, err := f.socket(ctx)
	if err != nil {
		return err
	}
	return adminsocket.With(ctx, socket, patience, do)
}

func (f *Flags) socket(ctx context.Context) (string, error) {
	switch {
	case f.Socket != "":
		return f.Socket, nil
	case f.Config != "":
		s, err := server.Load(f.Config)
		if err != nil {
			return "", err
		}
		return s.AdminSocket(), nil
	case f.Dev != "" && adminsocket.Probe(ctx, f.Dev) == nil:
		return f.Dev, nil
	}
	if f.Dev != "" {
		return "", errors.New("which server? Use -c with its config file, or --admin with its admin socket; no `chancery dev` answers on " + f.Dev)
	}
	return "", errors.New("which server? Use -c with its config file, or --admin with its admin socket")
}
