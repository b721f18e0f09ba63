package store_test

import (
	"path/filepath"
	"testing"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/storetest"
)

func TestSQLite(t *testing.T) {
	storetest.Run(t, storetest.Config{
		Name:  "state.db",
		Alone: true,
		New: func(t *testing.T) func(*testing.T) store.Store {
			path := filepath.Join(t.TempDir(), "state.db")
			return func(t *testing.T) store.Store {
				s, err := store.CreateSQLite(t.Context(), path)
				if err != nil {
					t.Fatal(err)
				}
				return s
			}
		},
	})
}
